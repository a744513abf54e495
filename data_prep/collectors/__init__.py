"""What chooses the actions during collection: noise, RND's curiosity, TD3's task reward."""
