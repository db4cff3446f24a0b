"""History."""
import streamlit as st
def render() -> None:
    st.write("soon")
