"""The command `kvjax`."""
