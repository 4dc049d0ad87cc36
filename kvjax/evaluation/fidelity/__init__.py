"""What a compressed cache keeps: of the attention of each layer, and of a text's likelihood."""
