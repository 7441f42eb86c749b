"""What an agent finds in its sandbox (world.py) and what goes wrong around its calls (perturbations.py)."""
