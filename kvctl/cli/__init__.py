"""The command tree: the only place that prints or exits. Commands import what they need when they run."""
