"""Help topics, served by `kvctl help`. Text only."""
