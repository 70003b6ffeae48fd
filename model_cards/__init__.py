"""Published drafters: one folder each, with the files of its Hub repository."""
