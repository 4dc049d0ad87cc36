"""The call that an attention layer makes, and what it carries from call to call."""
