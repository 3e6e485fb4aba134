"""The user's optimizer inside a wrapper: how it is called and saved."""
