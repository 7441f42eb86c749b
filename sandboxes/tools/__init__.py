"""One file a tool; registry.py finds them by name; tool.py makes one of your own function."""
