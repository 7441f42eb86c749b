"""One file a tool or a family of tools; registry.py finds them by name; tool.py makes one of your own function."""
