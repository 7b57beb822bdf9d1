"""Models: find one (`locate`), read its shape (`config`, `families`), build it (`transformer`), load its
weights (`weights`), and run its layers (`forms`)."""
