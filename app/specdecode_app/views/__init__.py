"""Views: pure functions from a trace to what is drawn. They know no Streamlit and no torch."""
