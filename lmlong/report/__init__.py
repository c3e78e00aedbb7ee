"""Tables, JSON and plots of whatever was measured."""
