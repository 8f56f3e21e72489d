"""An operator's commands on the blocks of a pool: one file a command, or a pair of commands that belong together."""
