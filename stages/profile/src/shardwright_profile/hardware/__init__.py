"""The hardware sweep: what messages and devices do, measured."""
