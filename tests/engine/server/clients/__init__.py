"""Other clients' libraries against the engine."""
