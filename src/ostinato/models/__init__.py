"""Models: find one (`locate`), read its shape (`config`, `families`), build it (`transformer`), fill it
(`weights`), and run its layers (`forms`)."""
