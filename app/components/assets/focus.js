// Puts the focus of a dialog on the button that changes nothing.
export default function ({ data, parentElement }) {
  const host = parentElement.host ?? parentElement;
  if (host.dataset.done) return;
  host.dataset.done = "1";
  let tries = 0;
  const look = () => {
    const dialog = host.closest("[role=dialog]");
    const button = [...(dialog?.querySelectorAll("button") ?? [])].find((node) => node.textContent.trim() === data.label);
    if (button) button.focus();
    else if (tries++ < 40) setTimeout(look, 50);
  };
  setTimeout(look, 120);
}
