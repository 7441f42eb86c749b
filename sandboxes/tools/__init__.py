"""One file for each tool or family of tools. registry.py finds them by name; tool.py turns a function into a tool."""
