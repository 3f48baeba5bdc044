"""The app's frame: the list of its pages. `streamlit run` starts here.

Each page is a file of `app_pages`; nothing is computed in this one.
"""

from pathlib import Path

import streamlit as st

# A named icon would be fetched from another machine; this one is served from here.
ICON = str(Path(__file__).with_name("icon.svg"))

st.set_page_config(page_title="Speculative decoding, watched", page_icon=ICON, layout="wide")
st.navigation([st.Page("app_pages/watch.py", title="Watch", default=True)], position="top").run()
