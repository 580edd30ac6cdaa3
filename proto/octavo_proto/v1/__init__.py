"""Generated stubs of ``octavo.v1``. Made by ``make stubs``; never edited by hand."""
