"""Figures with intervals, files that hold them (results.json and tables of rows), and interleaved timing."""
