"""The hardware sweep: measurements of collectives and devices."""
