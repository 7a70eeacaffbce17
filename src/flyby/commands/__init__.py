"""Groups of commands that stand beside the main ones of ``flyby.cli``, one file a group."""
