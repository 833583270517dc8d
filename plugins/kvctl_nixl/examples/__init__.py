"""Programs that show the plug-in from outside; they may print."""
