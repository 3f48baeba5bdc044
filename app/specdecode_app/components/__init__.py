"""Components: the animated tree, the one thing on the page that Streamlit cannot draw itself."""
