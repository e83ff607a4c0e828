"""Input and output of commands: files, tables, progress, and the format of help texts."""
