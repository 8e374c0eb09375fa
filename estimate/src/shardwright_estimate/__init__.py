"""What models, devices and clusters are and take by their shapes and published figures, with nothing measured."""
