"""Contract tests as classes, and small worlds to run them in; shipped, so that planners and actions elsewhere can use them."""
