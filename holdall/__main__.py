"""`python -m holdall`: the same as `holdall`, where its folder is not on the path."""

from holdall.cli import main

main()
