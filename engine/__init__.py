"""The reference instance: any decoder checkpoint that transformers loads, behind FastDeploy's own flags."""

from engine.args import set_native_defaults

# Before anything of this package imports torch: its thread pool reads the environment once, when it is loaded.
set_native_defaults()
