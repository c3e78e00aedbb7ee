"""A trained model at work: loaded from its run, it continues a text token by token from a state it carries along."""
