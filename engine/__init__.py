"""The reference instance: any decoder checkpoint that transformers loads, behind FastDeploy's own flags."""
