"""The data that an agent finds in its sandbox (world.py) and the faults applied to its calls (perturbations.py)."""
