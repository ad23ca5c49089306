"""The commands of `tokenspeed-engine`, one module each; the command line imports the one that it runs."""
