"""Drop-in functions for entries of comfy_kitchen, one module each."""
