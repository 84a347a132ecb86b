"""How long ops take, measured on this machine."""
