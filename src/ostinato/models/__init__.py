"""Models: find one (`locate`), read its shape (`config`), build it (`transformer`), fill it (`weights`)."""
