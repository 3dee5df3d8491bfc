"""Every private Lightning and torch name the package uses lives here, each with a test that it still exists."""
