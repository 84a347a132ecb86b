"""Model states of which a step uses a few: experts of a mixture, rows of embedding tables. What is used often is near, what is
used seldom is on the host or on a disk. These stand beside plans: a loop uses them by hand, and no plan counts their bytes."""
