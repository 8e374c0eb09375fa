"""Numbers with their units, and pictures as SVG, in one style for all commands and the report."""
