"""The commands, one file each: read the words, call one function, print. ``flyby.cli`` puts them together."""
