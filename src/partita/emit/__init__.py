"""Plans turned into Python source that a person could have written."""
