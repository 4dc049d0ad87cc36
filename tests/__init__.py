"""The tests of kvjax."""
