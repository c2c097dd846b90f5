"""Turn the files of a run into English: incidents, their timeline, sentences, bundles."""
