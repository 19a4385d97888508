"""What Textual has none of."""
