"""Test-time training (TTT): scoring modes that train the model, or adapters, on targets whose losses are final."""
