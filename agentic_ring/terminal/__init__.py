"""What a person sees of a command: flags, progress, tables, and messages in place of tracebacks."""
