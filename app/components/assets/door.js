// A provider sends people back to the dashboard's root: keeps the page they came for, and goes there
// once they are signed in. `data.open`: they are.
const KEPT = "counterpoise-came-for";

export default function ({ data }) {
  if (!data.open) {
    if (location.pathname !== "/" || location.search) sessionStorage.setItem(KEPT, location.pathname + location.search);
    return;
  }
  const wanted = sessionStorage.getItem(KEPT);
  sessionStorage.removeItem(KEPT);
  // A path of this dashboard and nothing else
  if (wanted && /^\/(?![/\\])/.test(wanted) && wanted !== location.pathname + location.search) location.replace(wanted);
}
