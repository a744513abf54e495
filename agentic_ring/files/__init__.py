"""Files and folders that are whole or absent, read only if they hold what they should."""
