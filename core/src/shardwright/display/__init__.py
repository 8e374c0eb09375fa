"""Numbers with their units, and pictures as SVG, alike in all commands and the report."""
