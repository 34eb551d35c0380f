"""What is planned for: the shape of a model, counted exactly or refused."""
