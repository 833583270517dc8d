"""Programs to read and to run: a model from a package, a prefill that is pushed, a fresh process that goes on."""
