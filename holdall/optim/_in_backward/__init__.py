"""Updates made while backward goes on."""
